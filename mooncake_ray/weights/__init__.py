"""Weights as boxes of canonical tensors, whatever the parallel layout: what ranks hold, what they want, and what goes from whom to whom."""
