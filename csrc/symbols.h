/* Functions of CUDA's and Python's, looked up at run time: there is no header of either here.
 *
 * A table is a structure of pointers; what each points to has a name, and a place in the table.
 */
#ifndef SALUS_SYMBOLS_H
#define SALUS_SYMBOLS_H

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

struct symbol {
    const char *name;
    size_t at;
};

#define SYMBOL(table, field, name) {name, offsetof(__typeof__(table), field)}
#define LOOK_UP(library, symbols, table) look_up(library, symbols, sizeof(symbols) / sizeof *(symbols), &(table))

/* Fills the table; -1 if one is missing. */
static inline int look_up(void *library, const struct symbol *symbols, size_t count, void *table) {
    for (size_t i = 0; i < count; i++) {
        void *found = dlsym(library, symbols[i].name);
        if (!found)
            return -1;
        memcpy((char *)table + symbols[i].at, &found, sizeof found);
    }
    return 0;
}

#endif
