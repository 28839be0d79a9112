"""Stream an answer from a Triton server on this machine over gRPC, then print its acceptance length."""

import queue

import numpy as np
import tritonclient.grpc as triton


def triton_input(name, value, kind, dtype):
    tensor = triton.InferInput(name, [1], kind)
    tensor.set_data_from_numpy(np.array([value], dtype=dtype))
    return tensor


inputs = [
    triton_input("text_input", b"def quicksort(", "BYTES", np.object_),
    triton_input("streaming", True, "BOOL", np.bool_),
    triton_input("sampling_param_max_tokens", 64, "INT32", np.int32),
    triton_input("sampling_param_return_perf_metrics", True, "BOOL", np.bool_),
]
responses = queue.Queue()
with triton.InferenceServerClient("127.0.0.1:8001") as client:  # left open, it can hang at exit
    client.start_stream(callback=lambda result, error: responses.put((result, error)))
    client.async_stream_infer("tensorrt_llm", inputs, enable_empty_final_response=True)
    while True:
        result, error = responses.get(timeout=60)
        if error is not None:
            raise error
        print(result.as_numpy("text_output")[0].decode())  # all text so far
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
    client.stop_stream()
print("acceptance length", result.as_numpy("acceptance_length")[0])
