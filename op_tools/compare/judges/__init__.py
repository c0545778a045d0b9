"""The judges of the ladder, one module each; `ladder.make_ladder` finds them."""
