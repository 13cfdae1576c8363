"""Hardware: times of a step, the tree and schedule that are fastest on them."""
