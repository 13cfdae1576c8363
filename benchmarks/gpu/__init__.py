"""Measures on a GPU all there is to know of this project, in half an hour: see README.md."""
