"""Weights from trainer ranks to engine ranks: a group of Ray actors, one version at a time, all or nothing."""
