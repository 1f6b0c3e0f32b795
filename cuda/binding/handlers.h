// The FFI handlers, one per operation, each defined in the file of its name.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace fa {

extern "C" {
XLA_FFI_Error* epilogue_handler(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* combine_handler(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* forward_handler(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* backward_handler(XLA_FFI_CallFrame* call_frame);
}

}  // namespace fa
