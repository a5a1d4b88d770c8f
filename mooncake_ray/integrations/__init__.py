"""Adapters: what other systems call a batch, a store or a backend, over this package's batches. Each module says which system it is for."""
