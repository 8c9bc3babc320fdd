// A small test harness for the host engine: cases that register themselves, checks that throw, a one-line launch.
//
//   SIMT_CASE(shuffle_swaps_neighbours) {
//     const Status status = run_kernel(1, 32, 0, [&] { ... });     // the body runs in every thread of every block
//     CHECK_OK(status);
//   }
//
// main.cpp runs the cases named on its command line. tests/library/test_simt.py builds it and runs case by case.
#pragma once

#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "sdpa/arch/simt/collectives.hpp"
#include "sdpa/arch/simt/launch.hpp"

namespace simt_test {

struct Case {
  const char *name;
  void (*body)();
};

inline std::vector<Case> &cases() {
  static std::vector<Case> all;
  return all;
}

struct Registration {
  Registration(const char *name, void (*body)()) { cases().push_back({name, body}); }
};

[[noreturn]] inline void fail_check(const char *file, int line, const std::string &what) {
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

#define SIMT_CASE(name)                                                  \
  static void name();                                                    \
  static const simt_test::Registration name##_registration(#name, name); \
  static void name()

#define CHECK(condition)                                                     \
  do {                                                                       \
    if (!(condition)) simt_test::fail_check(__FILE__, __LINE__, #condition); \
  } while (false)

#define CHECK_OK(status)                                                             \
  do {                                                                               \
    const sdpa::Status checked_ = (status);                                          \
    if (!checked_.ok()) simt_test::fail_check(__FILE__, __LINE__, checked_.message); \
  } while (false)

// Fails unless `status` is SDPA_HOST_CHECK and its message holds `text`.
#define CHECK_BROKEN_RULE(status, text)                                                                      \
  do {                                                                                                       \
    const sdpa::Status checked_ = (status);                                                                  \
    if (checked_.code != SDPA_HOST_CHECK || std::string(checked_.message).find(text) == std::string::npos) { \
      simt_test::fail_check(__FILE__, __LINE__,                                                              \
                            std::string("expected the error '") + (text) + "', got status " +                \
                                std::to_string(checked_.code) + " '" + checked_.message + "'");              \
    }                                                                                                        \
  } while (false)

template <class Body>
struct BodyParams {
  const Body *body;
};

template <class Body>
void body_kernel(BodyParams<Body> params) {
  (*params.body)();
}

template <class Body>
sdpa::Status run_kernel(int64_t blocks, int threads, int smem_bytes, const Body &body) {
  return sdpa::simt::launch(&body_kernel<Body>, "test_kernel", blocks, threads, smem_bytes, BodyParams<Body>{&body});
}

// Sets seed and OS threads for one scope.
class Configured {
 public:
  explicit Configured(uint64_t seed, int num_threads = 1) { sdpa::simt::configure(seed, num_threads); }
  ~Configured() { sdpa::simt::configure(0, 0); }
  Configured(const Configured &) = delete;
  Configured &operator=(const Configured &) = delete;
};

// Program order and enough random orders to meet every eagerness of the schedule.
constexpr uint64_t kNumSeeds = 24;

}  // namespace simt_test
