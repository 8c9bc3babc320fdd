/* sdpa_cutlass._launcher: a call whose signature is known, compiled. Optional: calls.py does the same in Python.
 *
 * Tensors are read through DLPack's C exchange interface (DLPack 1.x, `__dlpack_c_exchange_api__` of a tensor type),
 * so this file needs neither torch nor CUDA to be built, and one file serves every CPython from 3.10 on (stable ABI).
 *
 *   Launcher    a plan of the library's. run() writes addresses and calls sdpa_plan_launch.
 *   CallTable   the latest signatures. call() finds one, makes the results and launches; whatever it does not know,
 *               or must not decide, it leaves to the caller by returning None, before anything has happened.
 *   watch       what both ask of torch in each call, and tell it: torch_state.c.
 *
 * The GIL is released while the library works. What a call uses meanwhile is its own: a struct of addresses, and
 * references to all that other threads might drop from the table.
 */
#ifndef SDPA_CUTLASS_NATIVE_LAUNCHER_H
#define SDPA_CUTLASS_NATIVE_LAUNCHER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

#include "sdpa/c_api.h"

/* DLPack 1.x, as far as it is used. */
enum { kDLCPU = 1, kDLCUDA = 2, kDLBool = 6, kDLPackMajor = 1 };

typedef struct {
  int32_t type;
  int32_t index;
} DLDevice;

typedef struct {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} DLDataType;

typedef struct {
  void *data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape;
  int64_t *strides; /* in elements */
  uint64_t byte_offset;
} DLTensor;

typedef struct DLExchange {
  struct {
    uint32_t major, minor;
  } version;
  const struct DLExchange *older;
  void *allocate, *export_tensor, *import_tensor; /* not used */
  int (*view)(void *tensor, DLTensor *view);      /* may be null */
  int (*current_stream)(int32_t device_type, int32_t device, void **stream);
} DLExchange;

typedef int (*LaunchFunction)(const sdpa_plan *plan, const sdpa_addresses *addresses, void *stream);

typedef struct {
  PyObject_HEAD
  PyObject *tensor_type;
  const DLExchange *exchange;
  LaunchFunction launch;
  const sdpa_plan *plan;
  PyObject *owner; /* keeps the plan */
  int32_t device_type;
  int32_t device;
  sdpa_addresses addresses; /* what a launch does not write: the options and lengths that the plan was made with */
  PyObject *fail;           /* status -> raises */
  PyObject *make_workspace; /* (out, stream) -> (what to keep until the launch is queued, its address), or None */
} Launcher;

/* The type of a Launcher, once the module is there. */
extern PyTypeObject *launcher_type;

/* The type of a CallTable; null with an exception. */
PyObject *make_call_table_type(void);

/* False for another type, a subclass too, and for a tensor without memory; no exception is left behind. */
bool view_tensor(const Launcher *self, PyObject *tensor, DLTensor *view);

static inline void *address_of(const DLTensor *view) { return (char *)view->data + view->byte_offset; }

/* Of torch_state.c. 1 while torch has to see a call, 0 where it need not; -1 with an exception. */
int torch_is_watching(void);

/* 1 while torch records gradients, 0 under torch.no_grad; -1 with an exception. */
int torch_has_grad(void);

/* 1 for a tensor whose memory holds the negatives of its values, 0 for others; -1 with an exception. */
int is_neg(PyObject *tensor);

/* Tells autograd that `out`, and `lse` unless it is None, were written. Returns 0, or -1 with an exception. */
int tell_written(PyObject *out, PyObject *lse);

/* The module's function of this name. */
PyObject *watch(PyObject *module, PyObject *args);

/* Launches at `addresses`, to which it adds the workspace. Returns 0, or -1 with an exception. `out` is for the
 * launcher's `make_workspace`. */
int launch(const Launcher *self, sdpa_addresses *addresses, PyObject *out);

#endif
