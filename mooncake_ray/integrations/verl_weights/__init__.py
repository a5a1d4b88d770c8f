"""How the weights of verl's trainers get to its rollout workers: what `integrations.verl_checkpoint` is made of.

A trainer's `Sender` cuts what it is given into buckets, writes its share of them into its node's pool, and tells the `Board` of the update; a
worker's `Receiver` hears of them there, reads them, and makes tensors of them, or verl's flushes. Both talk to the board from a `Seat`.
"""
