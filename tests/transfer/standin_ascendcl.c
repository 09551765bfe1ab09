/* A stand-in for libascendcl.so: streams that are threads, and copies of the CPU's memory that are
 * made late. Calls have the signatures of CANN's acl/acl_rt.h, and refuse what it says they refuse.
 * With OLD defined it has neither the batched copy nor the registration that came with CANN 8.5,
 * with OLDEST no events that can be recorded again either.
 * What tests need besides begins with standin_.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { INVALID = 107000, UNSUPPORTED = 207000, TO_DEVICE = 1, TO_HOST = 2, MOST = 4096 };
typedef struct { uint32_t id; int type; } Location;
typedef struct { Location dst, src; uint8_t reserved[16]; } Attributes;
/* A wait is for the record before it, whatever is recorded later, as with events that
 * aclrtCreateEventExWithFlag makes: so each record has a place of its own. */
typedef struct { int *done; } Event;
typedef struct Work {
    enum { COPY, RECORD, WAIT, CALL } kind;
    char *dst; const char *src; size_t size;
    int *done; void (*call)(void);
    struct Work *next;
} Work;
typedef struct { pthread_t thread; Work *first, *last; long given, done; } Stream;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Stream *streams[MOST];
static int num_streams;
static struct { char *begin; size_t size; } pinned[MOST];
static int num_pinned;
static unsigned seed = 1;
static int inside; /* calls that submit copies */

/* Set by tests. */
int standin_fail_in = -1;  /* this many copies more are taken, and the next one is refused */
int standin_batch_error;   /* what the batched copy answers; nothing is enqueued then */
int standin_delay_us;      /* what a piece of work takes at most */
/* Read by tests. */
int standin_batches, standin_singles, standin_copies, standin_plain, standin_at_once;

static void *run(void *given)
{
    Stream *stream = given;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!stream->first) pthread_cond_wait(&changed, &lock);
        Work *work = stream->first;
        if (work->kind == WAIT)
            while (!*work->done) pthread_cond_wait(&changed, &lock);
        unsigned late = standin_delay_us ? rand_r(&seed) % standin_delay_us : 0;
        pthread_mutex_unlock(&lock);
        if (late) usleep(late);
        if (work->kind == COPY) memcpy(work->dst, work->src, work->size);
        if (work->kind == CALL) work->call();
        pthread_mutex_lock(&lock);
        if (work->kind == RECORD) *work->done = 1;
        stream->first = work->next;
        stream->done++;
        free(work);
        pthread_cond_broadcast(&changed);
    }
    return NULL;
}

static Work *give(Stream *stream, int kind) /* with the lock held */
{
    Work *work = calloc(1, sizeof *work);
    work->kind = kind;
    if (stream->first) stream->last->next = work; else stream->first = work;
    stream->last = work;
    stream->given++;
    pthread_cond_broadcast(&changed);
    return work;
}

static void finish(Stream *stream) /* with the lock held */
{
    long upto = stream->given;
    while (stream->done < upto) pthread_cond_wait(&changed, &lock);
}

static int is_pinned(const char *begin, size_t size)
{
    for (int i = 0; i < num_pinned; i++)
        if (begin >= pinned[i].begin && begin + size <= pinned[i].begin + pinned[i].size) return 1;
    return 0;
}

/* Plain memory: wait for the stream, copy, and return when it is done. */
static int copy(char *dst, size_t most, const char *src, size_t size, int kind, Stream *stream)
{
    if (size > most || !size || (kind != TO_DEVICE && kind != TO_HOST)) return INVALID;
    if (standin_fail_in == 0) { standin_fail_in = -1; return 507899; }
    if (standin_fail_in > 0) standin_fail_in--;
    int plain = !is_pinned(kind == TO_DEVICE ? src : dst, size);
    Work *work = give(stream, COPY);
    work->dst = dst; work->src = src; work->size = size;
    standin_copies++;
    if (plain) { standin_plain++; finish(stream); }
    return 0;
}

static void enter(void)
{
    int now = __atomic_add_fetch(&inside, 1, __ATOMIC_SEQ_CST);
    usleep(50); /* long enough for another one to come in, if nothing keeps it out */
    pthread_mutex_lock(&lock);
    if (now > standin_at_once) standin_at_once = now;
}

static void leave(void)
{
    pthread_mutex_unlock(&lock);
    __atomic_sub_fetch(&inside, 1, __ATOMIC_SEQ_CST);
}

int aclrtMemcpyAsync(void *dst, size_t most, const void *src, size_t size, int kind, void *stream)
{
    enter();
    int error = copy(dst, most, src, size, kind, stream);
    standin_singles++;
    leave();
    return error;
}

#ifndef OLDEST
int aclrtCreateEventExWithFlag(void **event, uint32_t flag)
{
    *event = flag == 1 ? calloc(1, sizeof(Event)) : NULL;
    return flag == 1 ? 0 : INVALID;
}
#endif

int aclrtHostUnregister(void *begin)
{
    int error = INVALID;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_pinned; i++)
        if (pinned[i].begin == begin) { pinned[i] = pinned[--num_pinned]; error = 0; break; }
    pthread_mutex_unlock(&lock);
    return error;
}

#ifndef OLD
int aclrtHostRegisterV2(void *begin, uint64_t size, uint32_t flag)
{
    if ((uintptr_t)begin % 4096 || flag != 0x10000000u) return INVALID;
    pthread_mutex_lock(&lock);
    pinned[num_pinned].begin = begin;
    pinned[num_pinned++].size = size;
    pthread_mutex_unlock(&lock);
    return 0;
}

int aclrtMemcpyBatchAsync(void **dsts, size_t *most, void **srcs, size_t *sizes, size_t count,
                          Attributes *attributes, size_t *firsts, size_t num_attributes,
                          size_t *failed, void *stream)
{
    *failed = SIZE_MAX;
    if (standin_batch_error) return standin_batch_error;
    int to_device = attributes->dst.type == 1;
    Location *device = to_device ? &attributes->dst : &attributes->src;
    Location *host = to_device ? &attributes->src : &attributes->dst;
    if (num_attributes != 1 || firsts[0] != 0 || !count || host->type != 0 || device->type != 1 ||
        device->id != 7)
        return INVALID;
    enter();
    int error = 0;
    for (size_t i = count; i-- && !error;) { /* there is no order within */
        error = copy(dsts[i], most[i], srcs[i], sizes[i], to_device ? TO_DEVICE : TO_HOST, stream);
        if (error) *failed = i;
    }
    standin_batches++;
    leave();
    return error;
}
#endif

void *standin_new_stream(void)
{
    Stream *stream = calloc(1, sizeof *stream);
    pthread_mutex_lock(&lock);
    streams[num_streams++] = stream;
    pthread_mutex_unlock(&lock);
    pthread_create(&stream->thread, NULL, run, stream);
    return stream;
}

void standin_record(Event *event, Stream *stream)
{
    pthread_mutex_lock(&lock);
    event->done = calloc(1, sizeof *event->done);
    give(stream, RECORD)->done = event->done;
    pthread_mutex_unlock(&lock);
}

void standin_wait(Stream *stream, Event *event)
{
    pthread_mutex_lock(&lock);
    give(stream, WAIT)->done = event->done;
    pthread_mutex_unlock(&lock);
}

void standin_call(Stream *stream, void (*call)(void))
{
    pthread_mutex_lock(&lock);
    give(stream, CALL)->call = call;
    pthread_mutex_unlock(&lock);
}

int standin_is_done(Event *event)
{
    pthread_mutex_lock(&lock);
    int done = !event->done || *event->done;
    pthread_mutex_unlock(&lock);
    return done;
}

void standin_finish_event(Event *event)
{
    pthread_mutex_lock(&lock);
    int *done = event->done;
    while (done && !*done) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

void standin_finish(Stream *stream) /* NULL: all */
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_streams; i++)
        if (!stream || streams[i] == stream) finish(streams[i]);
    pthread_mutex_unlock(&lock);
}

int standin_num_pinned(void) { return num_pinned; }
