"""The Ray face: real ObjectRefs whose tensors lie in the pool, with lifetimes that follow Ray's reference counting."""
