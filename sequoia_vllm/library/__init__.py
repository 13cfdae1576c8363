"""The library of trees: what lies in its files, which tree is for whom, and how it is made."""
