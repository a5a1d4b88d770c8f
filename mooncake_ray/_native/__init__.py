"""The only compiled Python: a thin binding of the C++ core. Private; use `mooncake_ray.store`."""
