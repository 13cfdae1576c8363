"""Decides how much of the tree to draft from what a serving engine measures; imports no vLLM.

`DraftController` follows an engine's steps: which drafts were accepted (`FadingAcceptance`), and
how long steps take (`StepTimes`, `PromptSteps`). At each batch size it takes the number of drafts
that gives most tokens per second. `AdaptationState` saves what it learned for the next start.
"""
