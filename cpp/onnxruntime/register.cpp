// SPDX-License-Identifier: Apache-2.0
// `_C` is a library of custom operators: SessionOptions.register_custom_ops_library calls RegisterCustomOps.
#include <string>

#include "onnxruntime/operator.h"

// ONNX Runtime defines the name and signature. Domains are never freed, because sessions outlive their options.
extern "C" __attribute__((visibility("default"))) dflash::ort::Status* RegisterCustomOps(
    dflash::ort::SessionOptions* options, const dflash::ort::ApiBase* base) {
  using namespace dflash::ort;
  const Api* api = base->get_api(kApiVersion);
  if (api == nullptr) {  // an older release, which also reports it on stderr
    const std::string problem = std::string("expected ONNX Runtime 1.17 or newer, found ") + base->get_version();
    return base->get_api(1)->create_status(kFail, problem.c_str());
  }
  static Domain* domain = nullptr;
  static Status* const failed = [&]() -> Status* {
    if (Status* status = api->create_domain("dflash_trt", &domain)) return status;
    for (const CustomOp* op : {&kAttentionOperator, &kLinearOperator}) {
      if (Status* status = api->add_operator(domain, op)) return status;
    }
    return nullptr;
  }();
  return failed != nullptr ? failed : api->add_domain(options, domain);
}
