"""Test only: the Triton backend ``cpu`` that vLLM's CPU platform asks for, without a compiler."""
