"""``python examples/train_drafter``: train drafters of three kinds, and measure them.

A draft model, an EAGLE-3 head or a DFlash head for any Llama-like target.
"""

import typer
from draft_commands import draft_data, evaluate_draft, train_draft_model, train_head_of_target
from errors import PairError

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_show_locals=False)
app.command()(draft_data)
app.command("train-draft")(train_draft_model)
app.command("train-head")(train_head_of_target)
app.command()(evaluate_draft)


if __name__ == "__main__":
    try:
        app()
    except PairError as error:
        raise SystemExit(f"error: {error}") from error
