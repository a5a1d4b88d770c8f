"""A data plane for reinforcement-learning post-training on Ray."""
