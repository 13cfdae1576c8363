"""What runs in the engine core: schedule, slots, grammars, adaptation, reports."""
