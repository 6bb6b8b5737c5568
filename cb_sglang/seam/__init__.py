"""The only place that touches SGLang internals.

platform.py, cpu_platform.py  SGLang on a CPU without AMX; steps aside when CUDA is there
cpu_backend.py                our CPU attention backend, registered with SGLang
plugin.py                     what SGLang calls at the start of each of its processes
hooks.py                      the functions of SGLang that we wrap, and why
scoring_batch.py              our side of one extend batch of SGLang
layers.py                     which layers are scored
row_lse.py                    the log-sum-exp for attention backends that do not leave it
check.py                      at start: does every seam still look as expected?
engine.py                     SGLang's TokenizerManager as the HTTP process uses it
"""

SGLANG_VERSION = "0.5.23"
