"""RWKV-v4 on enwik8: the reference training job, from one laptop to many devices."""
