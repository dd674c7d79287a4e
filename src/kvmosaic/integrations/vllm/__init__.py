"""Composed documents inside vLLM: a KV connector, and the ways in which documents reach it.

    contract.py     what a request says about its segments, in `kv_transfer_params`
    scheduler/      in the engine process: which chunks are there, what is moved, what is computed first
    worker/         in every worker: where the bytes are, how they are turned
    front/          in the API process: documents in a chat body, separators, handles; the Python `LLM`
    connector.py    the two halves as one vLLM connector
    plugin.py       what vLLM loads at its start

Nothing of vLLM is patched: the connector, the middleware and the entry point are vLLM's own ways in.
"""
