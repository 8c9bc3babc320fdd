// What this build sees beyond an ordinary one. Every unit of a library has to be compiled alike.
//
//   kIsObserved     plain loads and stores of shared memory, with -fsanitize=thread: observed.hpp
//   kHasCallChains  the calls that led to an access, for messages, with SDPA_SIMT_CALL_CHAINS or AddressSanitizer:
//                   places.hpp. Needs -fno-omit-frame-pointer
#pragma once

namespace sdpa::simt {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kIsObserved = true;
// For functions of the engine that touch shared memory on behalf of an instruction.
#define SDPA_SIMT_UNOBSERVED __attribute__((no_sanitize_thread))
// Looked at in every access: without a call.
#define SDPA_SIMT_THREAD_LOCAL __attribute__((tls_model("initial-exec"))) inline thread_local
#else
inline constexpr bool kIsObserved = false;
#define SDPA_SIMT_UNOBSERVED
#define SDPA_SIMT_THREAD_LOCAL inline thread_local
#endif

#if defined(__SANITIZE_ADDRESS__) || defined(SDPA_SIMT_CALL_CHAINS)
inline constexpr bool kHasCallChains = true;
#else
inline constexpr bool kHasCallChains = false;
#endif

}  // namespace sdpa::simt
