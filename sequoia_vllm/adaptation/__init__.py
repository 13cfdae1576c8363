"""Decides how much of the tree to draft from what a serving engine measures; imports no vLLM.

`DraftController` follows an engine's steps: which drafts were accepted (`FadingAcceptance`), and
how long steps take (`StepTimes`). From time to time it tries another number of drafts, or none.
It switches to what is clearly faster. `AdaptationState` saves what it learned for the next start.
"""
