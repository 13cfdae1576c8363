"""Entry point of group ``vllm.general_plugins``: vLLM calls `register` in every process."""

import logging

logger = logging.getLogger("vllm.sequoia")


def register() -> None:
    """Makes vLLM understand ``method: sequoia``; harmless when called again, or not used.

    Nothing of vLLM behaves differently until a Sequoia configuration is given.
    A vLLM that we do not fit is left alone: the error comes when Sequoia is
    asked for, not when the plugin is merely installed.
    """
    try:
        from sequoia_vllm.engine.hooks import install

        install()
    except (ImportError, AttributeError) as error:
        logger.warning("Sequoia: not usable with this vLLM: %s", error)
