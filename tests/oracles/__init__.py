"""Oracles: slow and plain, to check verifiers, drafting, attention and kernels against.

- `verification`: Algorithm 2 of the Sequoia paper, and drafting for it.
- `laws`: what follows every outcome with its probability, and chi-square tests.
- `attention`: tree attention over a paged KV cache, and the commit of accepted paths.
- `dynamic_trees`: the likeliest paths of a draft.
- `recurrence`: recurrent layers, token by token.
- `random_numbers`: what the kernels' random numbers are.

Nothing here is shared with the code that it checks: of this project it imports nothing.
"""
