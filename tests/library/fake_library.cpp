// A library with the whole C ABI and no kernels, to test how a wrong one is refused. Macros make it wrong:
// FAKE_ABI_VERSION, FAKE_TARGET, FAKE_VERSION, FAKE_PARAMS_SIZE, FAKE_REFUSES (the handshake), FAKE_LACKS_LAUNCH.
#include "sdpa/c_api.h"

#ifndef FAKE_ABI_VERSION
#define FAKE_ABI_VERSION SDPA_ABI_VERSION
#endif
#ifndef FAKE_TARGET
#define FAKE_TARGET SDPA_BUILT_FOR_HOST
#endif
#ifndef FAKE_PARAMS_SIZE
#define FAKE_PARAMS_SIZE sizeof(sdpa_params)
#endif

extern "C" {

const char *sdpa_last_error(void) { return "the fake's reason"; }

int sdpa_build_info_get(sdpa_build_info *info) {
#ifdef FAKE_REFUSES
  return SDPA_INVALID_ARGUMENT;
#endif
  *info = {info->struct_size, FAKE_ABI_VERSION, FAKE_TARGET, 13000, FAKE_PARAMS_SIZE, 420, FAKE_VERSION,
           "digest",          "smoke",          "89",        ""};
  return SDPA_OK;
}

int sdpa_kernel_count(void) { return 0; }
int sdpa_kernel_info_get(int, sdpa_kernel_info *) { return SDPA_INVALID_ARGUMENT; }
int sdpa_can_implement(int, const sdpa_params *) { return SDPA_NOT_SUPPORTED; }
int sdpa_workspace_bytes(int, const sdpa_params *, uint64_t *) { return SDPA_OK; }
#ifndef FAKE_LACKS_LAUNCH
int sdpa_launch(int, const sdpa_params *, int, void *) { return SDPA_CUDA_ERROR; }
#endif
int sdpa_plan_make(int, const sdpa_params *, int, sdpa_plan **, uint64_t *) { return SDPA_NOT_SUPPORTED; }
int sdpa_plan_launch(const sdpa_plan *, const sdpa_addresses *, void *) { return SDPA_CUDA_ERROR; }
void sdpa_plan_free(sdpa_plan *) {}
int sdpa_kernel_occupancy(int, int, int32_t *, int32_t *, int32_t *) { return SDPA_NOT_SUPPORTED; }
int sdpa_prepare(int, int) { return SDPA_OK; }
int sdpa_host_configure(uint64_t, int32_t) { return SDPA_HOST_CHECK; }
int sdpa_merge_states(int, const sdpa_merge_params *, int, void *) { return SDPA_OK; }
int sdpa_bwd_can_implement(int, const sdpa_bwd_params *) { return SDPA_NOT_SUPPORTED; }
int sdpa_bwd_workspace_bytes(int, const sdpa_bwd_params *, uint64_t *) { return SDPA_OK; }
int sdpa_bwd_launch(int, const sdpa_bwd_params *, int, void *) { return SDPA_CUDA_ERROR; }

}  // extern "C"
