"""What a learner needs of rollouts made under changing weights: which version made which token, and corrections for off-policy tokens."""
