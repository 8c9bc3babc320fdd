/* What torch does around a call, and what it has to be told: torch_state.py, compiled. */
#include "launcher.h"

/* A function without arguments that answers true or false. One of C is called without the interpreter's help. */
typedef struct {
  PyObject *object; /* null until watch() is called: then there is nothing to ask */
  PyObject *self;
  PyCFunction function; /* or null */
} Question;

enum { kQuestions = 2 };

static Question questions[kQuestions]; /* true while torch records operators */
static Question is_function_mode;      /* true where the next one has to be asked */
static Question pre_dispatch_depth;    /* true while torch records operators */
static Question is_grad_enabled;
static PyObject *forward_ad;        /* the variables of torch.autograd.forward_ad */
static PyObject *increment_version; /* (tensors) -> None */
static PyObject *level_name, *is_neg_name;

static int ask(const Question *question) {
  PyObject *const answer =
      question->function != NULL ? question->function(question->self, NULL) : PyObject_CallNoArgs(question->object);
  if (answer == NULL) return -1;
  const int is_true = answer == Py_False ? 0 : PyObject_IsTrue(answer);
  Py_DECREF(answer);
  return is_true;
}

static void set_question(Question *question, PyObject *object) {
  PyObject *const before = question->object;
  const bool is_simple = PyCFunction_Check(object) && PyCFunction_GetFlags(object) == METH_NOARGS;
  Py_INCREF(object);
  question->function = is_simple ? PyCFunction_GetFunction(object) : NULL;
  question->self = is_simple ? PyCFunction_GetSelf(object) : NULL;
  question->object = object;
  Py_XDECREF(before);
}

int torch_is_watching(void) {
  if (questions[0].object == NULL) return 0;
  for (int i = 0; i < kQuestions; ++i) {
    const int answer = ask(&questions[i]);
    if (answer != 0) return answer;
  }
  PyObject *const level = PyDict_GetItemWithError(forward_ad, level_name);
  if (level == NULL && PyErr_Occurred()) return -1;
  const long value = level == NULL ? -1 : PyLong_AsLong(level);
  if (value == -1 && PyErr_Occurred()) return -1;
  if (value >= 0) return 1;
  const int answer = ask(&is_function_mode);
  return answer == 1 ? ask(&pre_dispatch_depth) : answer;
}

int torch_has_grad(void) { return is_grad_enabled.object == NULL ? 1 : ask(&is_grad_enabled); }

int is_neg(PyObject *tensor) {
  if (is_neg_name == NULL) return 0;
  PyObject *const answer = PyObject_CallMethodObjArgs(tensor, is_neg_name, NULL);
  if (answer == NULL) return -1;
  Py_DECREF(answer);
  return answer != Py_False;
}

int tell_written(PyObject *out, PyObject *lse) {
  if (increment_version == NULL) return 0;
  PyObject *const tensors = lse == Py_None ? PyTuple_Pack(1, out) : PyTuple_Pack(2, out, lse);
  if (tensors == NULL) return -1;
  PyObject *const answer = PyObject_CallFunctionObjArgs(increment_version, tensors, NULL);
  Py_DECREF(tensors);
  if (answer == NULL) return -1;
  Py_DECREF(answer);
  return 0;
}

PyObject *watch(PyObject *module, PyObject *args) {
  (void)module;
  PyObject *depth, *tracing, *mode, *pre_depth, *variables, *grad, *increment;
  if (!PyArg_ParseTuple(args, "(OO)(OO)O!OO", &depth, &tracing, &mode, &pre_depth, &PyDict_Type, &variables, &grad,
                        &increment))
    return NULL;
  if (level_name == NULL) level_name = PyUnicode_InternFromString("_current_level");
  if (is_neg_name == NULL) is_neg_name = PyUnicode_InternFromString("is_neg");
  if (level_name == NULL || is_neg_name == NULL) return NULL;
  PyObject *const variables_before = forward_ad, *const increment_before = increment_version;
  Py_INCREF(variables);
  Py_INCREF(increment);
  forward_ad = variables;
  increment_version = increment;
  Py_XDECREF(variables_before);
  Py_XDECREF(increment_before);
  set_question(&is_function_mode, mode);
  set_question(&pre_dispatch_depth, pre_depth);
  set_question(&is_grad_enabled, grad);
  set_question(&questions[1], tracing);
  set_question(&questions[0], depth);
  Py_RETURN_NONE;
}
