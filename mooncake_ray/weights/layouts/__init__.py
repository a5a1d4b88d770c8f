"""How training frameworks and engines lay a model's tensors out, as tables."""
