"""One node's engine: brings objects of other nodes' pools into this node's, and serves this pool to them. Knows nothing of Ray."""
