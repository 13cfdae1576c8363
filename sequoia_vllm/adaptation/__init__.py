"""How much of the tree to draft, by what a serving engine measures; imports no vLLM.

`DraftController` follows an engine's steps: what became of the trees (`FadingAcceptance`), and
how long steps take (`StepTimes`). Now and then it tries other numbers of drafts for a few steps,
none among them, and goes over to what is clearly faster. `AdaptationState` keeps what it learned
for the engine's next start.
"""
