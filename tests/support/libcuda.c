/* A stand-in for the CUDA driver: the few entry points that marks use, with threads for streams.
 *
 * Every stream is a queue that its own thread works off in order; with CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share
 * one queue and one thread, as they share one hardware queue.  An event is the number of records enqueued, and of
 * those reached; a wait is for the event as it was recorded last before the wait was enqueued.
 */
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

typedef enum { RECORD, WAIT, HOST, SLEEP, WRITE, WRITE32, WAIT32 } Kind;
typedef struct Event { long recorded, reached; } Event;
typedef struct Item { Kind kind; Event *event; long number; void (*run)(void *); void *data; unsigned long long *word, value;
               struct Item *next; } Item;
typedef struct Stream { Item *first, **last; int busy; struct Stream *queue; int capturing; } Stream;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Stream *only; /* the one queue of all streams, or NULL */
static int failing;
static char log_of_calls[1 << 16];
static int logged;

static void note(char what) { if (logged < (int)sizeof log_of_calls - 1) log_of_calls[logged++] = what; }

static void *work(void *argument) {
    Stream *stream = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!stream->first) pthread_cond_wait(&changed, &lock);
        Item *item = stream->first;
        stream->busy = 1;
        if (!(stream->first = item->next)) stream->last = &stream->first;
        if (item->kind == RECORD) item->event->reached = item->number;
        if (item->kind == WRITE) __atomic_store_n(item->word, item->value, __ATOMIC_RELEASE);
        if (item->kind == WRITE32) __atomic_store_n((unsigned *)item->word, (unsigned)item->value, __ATOMIC_RELEASE);
        while (item->kind == WAIT32 && (int)(__atomic_load_n((unsigned *)item->word, __ATOMIC_ACQUIRE) - item->value) < 0) {
            pthread_mutex_unlock(&lock); /* the word may be written by another process */
            usleep(200);
            pthread_mutex_lock(&lock);
        }
        while (item->kind == WAIT && item->event->reached < item->number) pthread_cond_wait(&changed, &lock);
        if (item->kind == HOST || item->kind == SLEEP) {
            pthread_mutex_unlock(&lock);
            if (item->kind == HOST) item->run(item->data); else usleep(item->number);
            pthread_mutex_lock(&lock);
        }
        free(item);
        stream->busy = 0;
        pthread_cond_broadcast(&changed);
    }
    return NULL;
}

static int enqueue(Stream *stream, Item item) {
    Item *copy = malloc(sizeof *copy);
    *copy = item;
    copy->next = NULL;
    *stream->queue->last = copy;
    stream->queue->last = &copy->next;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return 0;
}

static Stream *make(void) {
    const char *connections = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    Stream *stream = calloc(1, sizeof *stream);
    stream->last = &stream->first;
    stream->queue = connections && atoi(connections) == 1 && only ? only : stream;
    if (stream->queue == stream) {
        pthread_t thread;
        pthread_create(&thread, NULL, work, stream);
        pthread_detach(thread);
        if (!only) only = stream;
    }
    return stream;
}

/* As in cuda.h, CUDA 13. */
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return failing; }
int cuStreamCreateWithPriority(Stream **stream, unsigned flags, int priority) {
    if (flags != 1 || priority > 0 || priority < -5) return 1; /* CUDA_ERROR_INVALID_VALUE */
    *stream = make();
    return failing;
}
int cuEventCreate(Event **event, unsigned flags) { *event = calloc(1, sizeof **event); return flags == 2 ? failing : 1; }
int cuStreamIsCapturing(Stream *stream, int *status) { *status = stream->capturing; note('c'); return failing; }
int cuEventRecord(Event *event, Stream *stream) {
    note('r');
    if (failing) return failing;
    pthread_mutex_lock(&lock);
    return enqueue(stream, (Item){.kind = RECORD, .event = event, .number = ++event->recorded});
}
int cuStreamWaitEvent(Stream *stream, Event *event, unsigned flags) {
    note('w');
    if (failing || flags) return failing ? failing : 1;
    pthread_mutex_lock(&lock);
    return enqueue(stream, (Item){.kind = WAIT, .event = event, .number = event->recorded});
}
int cuLaunchHostFunc(Stream *stream, void (*run)(void *), void *data) {
    note('h');
    if (failing) return failing;
    pthread_mutex_lock(&lock);
    return enqueue(stream, (Item){.kind = HOST, .run = run, .data = data});
}

enum { PAGES = 16 };
static struct { char *page; unsigned long size; } registered[PAGES];
static int holds(char *at, int bytes) {
    for (int i = 0; i < PAGES; i++)
        if (registered[i].page && at >= registered[i].page && at + bytes <= registered[i].page + registered[i].size) return 1;
    return 0;
}
int cuMemHostRegister_v2(void *page, unsigned long size, unsigned flags) {
    int i = 0;
    if (!(flags & 2) || (unsigned long)page % 4096 || holds(page, 1)) return 1;
    while (i < PAGES && registered[i].page) i++;
    if (i == PAGES) return 2; /* CUDA_ERROR_OUT_OF_MEMORY */
    registered[i].page = page;
    registered[i].size = size;
    return failing;
}
/* The device's address of a page is another one than the host's. */
enum { ELSEWHERE = 1 << 20 };
int cuMemHostGetDevicePointer_v2(unsigned long long *device, void *page, unsigned flags) {
    if (flags || !holds(page, 1)) return 1;
    *device = (unsigned long long)page + ELSEWHERE;
    return failing;
}
int cuStreamWriteValue64_v2(Stream *stream, unsigned long long device, unsigned long long value, unsigned flags) {
    char *at = (char *)(device - ELSEWHERE);
    note('v');
    if (failing) return failing;
    if (flags || !holds(at, 8) || device % 8) return 1;
    pthread_mutex_lock(&lock);
    return enqueue(stream, (Item){.kind = WRITE, .word = (unsigned long long *)at, .value = value});
}

static int value32(Stream *stream, Kind kind, unsigned long long device, unsigned value, unsigned flags) {
    char *at = (char *)(device - ELSEWHERE);
    if (failing) return failing;
    if (flags || !holds(at, 4) || device % 4) return 1;
    pthread_mutex_lock(&lock);
    return enqueue(stream, (Item){.kind = kind, .word = (unsigned long long *)at, .value = value});
}
int cuStreamWriteValue32_v2(Stream *stream, unsigned long long device, unsigned value, unsigned flags) {
    note('V');
    return value32(stream, WRITE32, device, value, flags);
}
int cuStreamWaitValue32_v2(Stream *stream, unsigned long long device, unsigned value, unsigned flags) {
    note('W');
    return value32(stream, WAIT32, device, value, flags);
}

/* For the tests. */
Stream *stand_in_stream(void) { return make(); }
void stand_in_compute(Stream *stream, long microseconds) {
    pthread_mutex_lock(&lock);
    enqueue(stream, (Item){.kind = SLEEP, .number = microseconds});
}
void stand_in_host(Stream *stream, void (*run)(void *), void *data) {
    pthread_mutex_lock(&lock);
    enqueue(stream, (Item){.kind = HOST, .run = run, .data = data});
}
void stand_in_capture(Stream *stream, int status) { stream->capturing = status; }
void stand_in_fail(int code) { failing = code; }
const char *stand_in_calls(void) { log_of_calls[logged] = 0; logged = 0; return log_of_calls; }
