# SPDX-License-Identifier: Apache-2.0
"""Engine mode: our TensorRT plans in place of TensorRT-LLM's own DFlash drafter. Not yet run with TensorRT-LLM.

TensorRT-LLM builds the drafter of a speculative-decoding mode with a registered function; one from outside its
package wins over its own. Ours returns a module with the drafter's interface that runs two TensorRT plans.
`make contract` compares a release with that interface.
"""
