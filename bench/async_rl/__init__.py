"""A job of reinforcement learning without its accelerators: these sleep, and the bytes are real. See `bench.async_loop`."""
