// Streams: everything is done at once, unless it is captured.
#include "driver.h"

bool is_capturing(CUstream stream) { (void)stream; return false; }

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *out) {
  *out = is_capturing(stream) ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
