"""Real inference engines on this machine's CPUs: their servers, and each way to give them new weights."""
