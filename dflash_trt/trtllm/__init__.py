# SPDX-License-Identifier: Apache-2.0
"""Engine mode: our TensorRT plans in the place of TensorRT-LLM's own DFlash drafter. Not yet run with TensorRT-LLM.

TensorRT-LLM builds the drafter of a speculative-decoding mode with a registered function; one from outside its
package wins over its own. Ours returns a module with the drafter's interface whose work is two TensorRT plans, on
every rank the same ones: the draft step needs no collective. `contract.py` says what that interface was read from.
"""
