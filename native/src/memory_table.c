/* What this process holds, by handle: one table of open addressing for all kinds. Its memory comes straight from the
 * system: the program's allocator may be in any state when we are called, after a fork above all.
 */
#include <string.h>
#include <sys/mman.h>

#include "memory_rooms.h"

#define FIRST_PLACES 512

static struct st_held *places;
static size_t num_places; /* a power of two */
static size_t num_held;

static size_t place_of(enum st_held_kind kind, uint64_t key) {
    uint64_t mixed = (key ^ ((uint64_t)kind << 56)) * 0x9E3779B97F4A7C15u;
    return (size_t)(mixed ^ (mixed >> 29)) & (num_places - 1);
}

/* Where this key is, or the free place where it would be. */
static size_t seek(enum st_held_kind kind, uint64_t key) {
    size_t place = place_of(kind, key);
    while (places[place].kind != ST_HELD_NOTHING && (places[place].kind != kind || places[place].key != key)) {
        place = (place + 1) & (num_places - 1);
    }
    return place;
}

static bool grow(void) {
    struct st_held *old = places;
    size_t num_old = num_places;
    size_t num_new = num_old == 0 ? FIRST_PLACES : 2 * num_old;
    size_t bytes = num_new * sizeof(struct st_held);
    void *new = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (new == MAP_FAILED) {
        return false;
    }
    places = new;
    num_places = num_new;
    for (size_t i = 0; i < num_old; i++) {
        if (old[i].kind != ST_HELD_NOTHING) {
            places[seek(old[i].kind, old[i].key)] = old[i];
        }
    }
    if (old != NULL) {
        munmap(old, num_old * sizeof(struct st_held));
    }
    return true;
}

bool st_table_put(const struct st_held *held) {
    /* Two thirds at most are taken; where it cannot grow, one place stays free, so that every search ends. */
    if (3 * (num_held + 1) > 2 * num_places && !grow() && num_held + 1 >= num_places) {
        return false;
    }
    size_t place = seek(held->kind, held->key);
    num_held += places[place].kind == ST_HELD_NOTHING;
    places[place] = *held;
    return true;
}

struct st_held *st_table_find(enum st_held_kind kind, uint64_t key) {
    if (num_places == 0) {
        return NULL;
    }
    size_t place = seek(kind, key);
    return places[place].kind == ST_HELD_NOTHING ? NULL : &places[place];
}

bool st_table_take(enum st_held_kind kind, uint64_t key, struct st_held *held) {
    struct st_held *found = st_table_find(kind, key);
    if (found == NULL) {
        return false;
    }
    *held = *found;
    num_held--;
    /* Close the gap: whoever was pushed past it moves back. */
    size_t gap = (size_t)(found - places);
    size_t place = gap;
    for (;;) {
        place = (place + 1) & (num_places - 1);
        if (places[place].kind == ST_HELD_NOTHING) {
            break;
        }
        size_t wanted = place_of(places[place].kind, places[place].key);
        if (((place - wanted) & (num_places - 1)) >= ((place - gap) & (num_places - 1))) {
            places[gap] = places[place];
            gap = place;
        }
    }
    places[gap].kind = ST_HELD_NOTHING;
    return true;
}

struct st_held *st_table_next(size_t *index) {
    while (*index < num_places) {
        struct st_held *held = &places[(*index)++];
        if (held->kind != ST_HELD_NOTHING) {
            return held;
        }
    }
    return NULL;
}

void st_table_forked(void) {
    /* Another thread of the parent may have been in the middle of a change: nothing of it is looked at. */
    if (places != NULL && num_places != 0) {
        munmap(places, num_places * sizeof(struct st_held));
    }
    places = NULL;
    num_places = 0;
    num_held = 0;
}
