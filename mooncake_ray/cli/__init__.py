"""`mooncake-ray`: look at pools, and at the machine they are to run on. Imports neither torch nor ray."""
