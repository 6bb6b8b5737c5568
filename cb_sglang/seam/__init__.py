"""The only place that touches SGLang internals.

platform.py, cpu_platform.py  SGLang on a CPU without AMX; steps aside when CUDA is there
cpu_backend.py                our CPU attention backend, registered with SGLang
plugin.py                     what SGLang calls at the start of each of its processes
hooks.py                      the functions of SGLang that we wrap, and why
task.py                       one request of ours in the scheduler
scoring_batch.py              our side of one extend batch of SGLang
selecting.py                  from moments to kept positions
shared_prefix.py              one prefix read for all queries of a sender, with FlashInfer
latent.py                     input embeddings: looked up, and rolled on as latent rows
pins.py                       senders that SGLang must not evict
layers.py                     which layers are scored
row_lse.py                    the log-sum-exp for attention backends that do not leave it
check.py, readiness.py        at start: does every seam still look as expected, and can the model be scored?
engine.py                     SGLang's TokenizerManager as the HTTP process uses it
chat.py                       SGLang's chat completions, with messages in the prompt
fingerprints.py               which model and tokenizer a server runs
"""

SGLANG_VERSION = "0.5.23"
