/* The two hooks that are left around a step while a script's iterations follow one another, as functions for Python.
 *
 * Written in Python they take ten microseconds of an iteration, since whatever they touch is cold by then, and a short
 * iteration has little more than a thousand. Called by Python as its own built-in functions are; with its lock held, so no
 * other thread of Python's comes in between. Whatever is not as expected is left to the hook in Python that was given.
 *
 * Python's functions are looked up in the process; there is no header of Python's here.
 */
#include "state.h"
#include "symbols.h"

#define RUNNING_ON 4 /* JobState */
#define METH_FASTCALL 0x80
#define STEP_ARGUMENTS 3

typedef void *(*function)(void *self, void *const *arguments, long count);

struct method { /* PyMethodDef */
    const char *name;
    function call;
    int flags;
    const char *text;
};

static struct {
    void *(*PyCFunction_NewEx)(struct method *, void *, void *);
    void *(*PyObject_CallFunctionObjArgs)(void *, ...);
    void *(*PyObject_GetAttr)(void *, void *);
    void *(*PyUnicode_InternFromString)(const char *);
    int (*PyObject_IsTrue)(void *);
    void (*PyErr_Clear)(void);
    void (*Py_IncRef)(void *);
    void (*Py_DecRef)(void *);
    void *_Py_NoneStruct;
} python;

static struct {
    volatile uint64_t *page;
    const void *leader;
    void *before, *after; /* the hooks in Python */
    void *state;          /* the name of an attribute */
    uint64_t longest_ns, turns;
} steps;

static void *done(void) {
    python.Py_IncRef(python._Py_NoneStruct);
    return python._Py_NoneStruct;
}

static void *leave_to(void *hook, void *const *arguments, long count) {
    if (count != STEP_ARGUMENTS)
        return done(); /* nobody calls it like this */
    return python.PyObject_CallFunctionObjArgs(hook, arguments[0], arguments[1], arguments[2], NULL);
}

static void *nothing(void *self, void *const *arguments, long count) {
    (void)self, (void)arguments, (void)count;
    return done();
}

/* An optimizer without its state is about to make it. */
static void *has_state(void *self, void *const *arguments, long count) {
    void *state = count ? python.PyObject_GetAttr(arguments[0], steps.state) : NULL;
    int there = state ? python.PyObject_IsTrue(state) : -1;
    (void)self;
    if (state)
        python.Py_DecRef(state);
    if (there < 0)
        python.PyErr_Clear();
    return there > 0 ? done() : leave_to(steps.before, arguments, count);
}

/* As `Turn.end` does it (client/turns.py). */
static int turn(void) {
    uint64_t now = now_ns(), began = steps.page[BEGAN_NS];
    if (steps.page[STATE] != RUNNING_ON || steps.page[REVOKE] || now - began > steps.longest_ns)
        return 0;
    /* In this order; `Page.used` counts on it. */
    steps.page[BEGAN_NS] = now;
    steps.page[BUSY_NS] += now - began;
    steps.page[ITERATIONS]++;
    steps.page[BOUNDARIES]++;
    steps.turns++;
    return 1;
}

static void *step_ended(void *self, void *const *arguments, long count) {
    (void)self;
    return count && arguments[0] == steps.leader && turn() ? done() : leave_to(steps.after, arguments, count);
}

static struct method methods[] = {
    {"before_step", nothing, METH_FASTCALL, NULL},
    {"before_step", has_state, METH_FASTCALL, NULL},
    {"after_step", step_ended, METH_FASTCALL, NULL},
};

static int load(void) {
    static const struct symbol symbols[] = {
#define NAMED(name) SYMBOL(python, name, #name)
        NAMED(PyCFunction_NewEx), NAMED(PyObject_CallFunctionObjArgs), NAMED(PyObject_GetAttr),
        NAMED(PyObject_IsTrue),   NAMED(PyUnicode_InternFromString),   NAMED(PyErr_Clear),
        NAMED(Py_IncRef),         NAMED(Py_DecRef),                    NAMED(_Py_NoneStruct),
#undef NAMED
    };
    return LOOK_UP(RTLD_DEFAULT, symbols, python);
}

int salus_steps_follow(volatile uint64_t *page, const void *leader, void *before, void *after, uint64_t longest_ns) {
    if (!python._Py_NoneStruct && load())
        return -1;
    if (!steps.state && !(steps.state = python.PyUnicode_InternFromString("state")))
        return -1;
    steps.page = page;
    steps.leader = leader;
    steps.before = before;
    steps.after = after;
    steps.longest_ns = longest_ns;
    return 0;
}

void *salus_steps_hook(unsigned which) {
    return python.PyCFunction_NewEx(&methods[which], NULL, NULL);
}

const uint64_t *salus_steps_turns(void) {
    return &steps.turns;
}
