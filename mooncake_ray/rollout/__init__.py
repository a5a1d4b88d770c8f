"""Rollouts between those that sample them and those that learn from them: by which weights they were made, and how old these may be."""
