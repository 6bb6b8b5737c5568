"""The only place that touches SGLang internals.

platform.py, cpu_platform.py  SGLang on a CPU without AMX; steps aside when CUDA is there
cpu_backend.py                our CPU attention backend, registered with SGLang
hooks.py                      the functions of SGLang that we wrap in every process, and why
scoring_batch.py              one extend batch of SGLang, seen by cb_kernels
check.py                      at start: does every seam still look as expected?
engine.py                     SGLang's TokenizerManager as the HTTP process uses it
"""

SGLANG_VERSION = "0.5.23"
