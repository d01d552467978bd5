/* What work.c offers to graph.c beside hooks.h: graphs are weighed and weighed again while they live. */
#ifndef SPRINGTIDE_WORK_H
#define SPRINGTIDE_WORK_H

#include "hooks.h"

/* No piece of work counts as less: the events cannot tell shorter times apart. */
#define ST_LEAST_COST_NS 500u
/* What an instantiated graph counts as of which nothing is known. */
#define ST_UNKNOWN_GRAPH_NS 20000u

/* Begin anew with this graph: its handle may have belonged to another one before. */
void st_work_begin_graph(CUgraphExec graph, uint64_t first_guess_ns);
/* The graph's nodes were changed, by the first guess it weighs `after_ns` now. What was measured is changed in the same
 * proportion, and measured anew soon. */
void st_work_change_graph(CUgraphExec graph, uint64_t after_ns);
/* The graph is gone. */
void st_work_forget_graph(CUgraphExec graph);

/* sample.c. Called only where a launch is due to be measured. */
struct st_sample {
    _Atomic uint32_t state;
    CUevent begin;
    CUevent end;
    struct st_work *work;
    uint32_t generation; /* of the work, as it was */
    uint64_t size;       /* the same */
    uint64_t charged_ns;
    struct st_bucket *bucket;
    bool was_idle;        /* nothing was under way in the stream before */
    uint64_t recorded_ns; /* the event before the launch stands in the stream ... */
    uint64_t ready_ns;    /* ... and the launch itself begins */
    uint64_t gap_ns;      /* how long the device had to wait for it in between */
};
/* Read what was measured in this context meanwhile, and put an event before the launch unless it is only about reading;
 * NULL where this is no moment for it. */
struct st_sample *st_sample_begin(const struct st_ticket *ticket, CUstream stream, bool per_thread, bool only_read);
/* Put an event behind it, or forget it where the launch failed. */
void st_sample_end(struct st_sample *sample, CUstream stream, bool per_thread, bool was_launched);
void st_sample_forked(void);
/* A launch took `measured_ns`. */
void st_work_measured(const struct st_sample *sample, uint64_t measured_ns);

/* capture.c */
void st_capture_forked(void);

/* A kernel in one shape, or an instantiated graph: one line of the cache. All fields are read and written without a
 * lock; what two threads do to one entry at once may lose a count, never more. */
struct st_work {
    _Alignas(64) _Atomic uint64_t key; /* 0: free */
    _Atomic uint64_t cost_ns;          /* 0: being filled */
    _Atomic(const void *) function;    /* NULL for a graph */
    _Atomic uint64_t size; /* a kernel's blocks; a graph's first guess */
    _Atomic uint32_t num_launches;
    _Atomic uint32_t next_sample; /* measured at the first launch that is not before this one */
    _Atomic uint32_t num_samples;
    _Atomic uint32_t generation; /* rises when the entry becomes other work: measurements under way are void */
    _Atomic uint32_t call_ns; /* what the driver needs to launch it, as a rule; 0: never seen */
    _Atomic bool is_graph; /* graphs are not driven out by other work: their first guess costs a walk */
};

_Static_assert(sizeof(struct st_work) == 64, "one line of the cache");

#endif
