/* CUDA graphs that are being captured in this process.
 *
 * A capture is spoilt by any call of the driver that waits for the device or changes what is mapped, whichever thread makes
 * the call. So while a capture is under way, nothing in here makes such a call on its own account: each function that
 * would asks `captures` first, and puts its work off or refuses. What the script's own threads do is as without Salus:
 * the adaptor sends no allocation here meanwhile.
 *
 * Only this file changes `arena.captures`, and it holds the lock for that. A thread that calls the driver with the lock held
 * has finished before a capture begins. A thread waits for the device without the lock, so such waits are counted instead.
 */
#include "state.h"

static pthread_cond_t waited = PTHREAD_COND_INITIALIZER;

void salus_arena_capture_began(void) {
    pthread_mutex_lock(&arena.lock);
    arena.captures++;
    while (arena.waits)
        pthread_cond_wait(&waited, &arena.lock);
    pthread_mutex_unlock(&arena.lock);
}

void salus_arena_capture_ended(void) {
    pthread_mutex_lock(&arena.lock);
    if (arena.captures)
        arena.captures--;
    pthread_mutex_unlock(&arena.lock);
}

int begin_driver_calls(void) {
    int captures;
    pthread_mutex_lock(&arena.lock);
    captures = arena.captures != 0;
    if (!captures)
        arena.waits++;
    pthread_mutex_unlock(&arena.lock);
    return captures ? -1 : 0;
}

void end_driver_calls(void) {
    pthread_mutex_lock(&arena.lock);
    if (!--arena.waits)
        pthread_cond_broadcast(&waited);
    pthread_mutex_unlock(&arena.lock);
}

int salus_arena_wait(void) {
    const struct device *device;
    int entered, status = -1;
    pthread_mutex_lock(&arena.lock);
    device = arena.device;
    pthread_mutex_unlock(&arena.lock);
    if (!device || begin_driver_calls())
        return status;
    /* Not with the lock: other threads of the script allocate meanwhile. */
    entered = device->enter();
    status = device->idle();
    device->leave(entered);
    end_driver_calls();
    return status;
}
