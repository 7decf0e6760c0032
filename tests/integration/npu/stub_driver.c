/* A stand-in for the libraries of CANN, so that the real torch_npu starts and profiles where there is no NPU.
 *
 * torch_npu's wheel needs eleven libraries of CANN, which are not in the wheel and not on PyPI: six are linked, the
 * others loaded when used. This one file is all of them: conftest.py compiles it to libascendcl.so, which has every
 * symbol, and ten empty libraries that name it as needed. With them torch_npu's own code runs: its Python, its C++
 * profiler, its raw files, its analysis.
 *
 * Device memory is the host's, nothing is computed (results are zeros), and no time passes on the device. So it shows
 * which calls a profiler makes, with which arguments, in which order and thread, and what torch_npu leaves on the disk.
 * It cannot show kernels, times, communication, ranges on the device, or crashes under load.
 *
 * Environment:
 *   STUB_DRIVER_LOG             file to which every logged call is appended, as one JSON object per line
 *   STUB_DRIVER_DEVICES         number of devices, 1 unless set
 *   STUB_DRIVER_FAIL            comma-separated logged calls that fail, as "aclprofStart,aclrtSetDevice"
 *   STUB_DRIVER_NO_DEVICE_DATA  if set, a capture leaves no folder of device data, as when the device gave none
 *   STUB_DRIVER_LOSE_TASKS      number of tasks at the head of each capture that leave no device data
 *
 * While a capture runs, each operator that is launched adds a line to device_N/data/stub_tasks of the capture: its type
 * and when it was launched, in ns since the epoch. stub_msprof.py makes the rows of the device from them.
 *
 * Written from the headers in torch_npu's wheel (torch_npu/include/acl, torch_npu/include/profiling); those of mstx and
 * of aclprofGetSupportedFeaturesV2 are not in it, and are as torch_npu's sources call them.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define FAILURE 500000 /* ACL_ERROR_INTERNAL_ERROR */
#define MEMORY (64ULL << 30) /* bytes that each device says it has */

/* --- What is logged --------------------------------------------------------------------------------------------- */

static int64_t now_ns(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void quoted(char *to, size_t room, const char *from, size_t length) {
    size_t used = 0;
    for (size_t i = 0; from && i < length && from[i] && used + 7 < room; i++) {
        unsigned char c = (unsigned char)from[i];
        if (c == '"' || c == '\\') {
            to[used++] = '\\';
            to[used++] = (char)c;
        } else if (c < 0x20) {
            used += (size_t)snprintf(to + used, room - used, "\\u%04x", c);
        } else {
            to[used++] = (char)c;
        }
    }
    to[used] = 0;
}

/* Log a call; `format` gives its arguments as JSON members, each after a comma. Returns whether it is to fail. */
static int called(const char *name, const char *format, ...) {
    const char *failing = getenv("STUB_DRIVER_FAIL");
    int fails = 0;
    size_t length = strlen(name);
    for (const char *at = failing; at && (at = strstr(at, name)); at += length)
        fails |= (at == failing || at[-1] == ',') && (at[length] == 0 || at[length] == ',');
    const char *path = getenv("STUB_DRIVER_LOG");
    if (path) {
        char line[8192];
        int used = snprintf(line, 1024, "{\"call\": \"%s\", \"pid\": %d, \"tid\": %d, ", name, getpid(), gettid());
        used += snprintf(line + used, 1024, "\"time_ns\": %lld, \"failed\": %s", (long long)now_ns(CLOCK_REALTIME),
                         fails ? "true" : "false");
        va_list arguments;
        va_start(arguments, format);
        used += vsnprintf(line + used, sizeof line - (size_t)used - 3, format, arguments);
        va_end(arguments);
        used += snprintf(line + used, 3, "}\n");
        int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        /* One write, so that the lines of threads and processes do not mix. */
        if (file < 0 || write(file, line, (size_t)used) != used) {
            perror("stub driver: STUB_DRIVER_LOG cannot be written");
            abort();
        }
        close(file);
    }
    return fails;
}

#define LOGGED(name, ...) (called(#name, __VA_ARGS__) ? FAILURE : 0)

/* --- Symbols that need do nothing ------------------------------------------------------------------------------- */

#define NOTHING(name) \
    int64_t name(void) { return 0; }

NOTHING(MsprofGetHashId) NOTHING(MsprofRegisterCallback) NOTHING(MsprofReportAdditionalInfo)
NOTHING(MsprofReportApi) NOTHING(MsprofReportCompactInfo)
NOTHING(aclAppLog) NOTHING(aclDestroyDataBuffer) NOTHING(aclDestroyTensorDesc)
NOTHING(aclGetTensorDescDimV2) NOTHING(aclGetTensorDescFormat) NOTHING(aclGetTensorDescNumDims)
NOTHING(aclGetTensorDescType) NOTHING(aclSetTensorDescName) NOTHING(aclSetTensorFormat)
NOTHING(aclSetTensorPlaceMent) NOTHING(aclSetTensorShape)
NOTHING(aclmdlFinalizeDump) NOTHING(aclmdlInitDump) NOTHING(aclmdlSetDump)
NOTHING(aclopDestroyAttr)
NOTHING(aclopSetAttrBool) NOTHING(aclopSetAttrDataType) NOTHING(aclopSetAttrFloat) NOTHING(aclopSetAttrInt)
NOTHING(aclopSetAttrListBool) NOTHING(aclopSetAttrListFloat) NOTHING(aclopSetAttrListInt)
NOTHING(aclopSetAttrListListInt) NOTHING(aclopSetAttrString) NOTHING(aclSetCompileopt)
NOTHING(aclrtBinaryGetFunction) NOTHING(aclrtBinaryLoadFromData) NOTHING(aclrtDestroyEvent)
NOTHING(aclrtDestroyStream) NOTHING(aclrtDestroyStreamForce) NOTHING(aclrtDeviceEnablePeerAccess)
NOTHING(aclrtFreePhysical) NOTHING(aclrtGetFunctionAddr) NOTHING(aclrtMapMem) NOTHING(aclrtMallocPhysical)
NOTHING(aclrtMemExportToShareableHandle) NOTHING(aclrtMemImportFromShareableHandle)
NOTHING(aclrtMemSetPidToShareableHandle) NOTHING(aclrtProcessReport) NOTHING(aclrtRecordEvent)
NOTHING(aclrtReleaseMemAddress) NOTHING(aclrtReserveMemAddress) NOTHING(aclrtResetDevice) NOTHING(aclrtResetEvent)
NOTHING(aclrtSetCurrentContext) NOTHING(aclrtStreamWaitEvent) NOTHING(aclrtSynchronizeEvent)
NOTHING(aclrtSynchronizeStream) NOTHING(aclrtUnmapMem) NOTHING(aclrtSynchronizeStreamWithTimeout)
NOTHING(aclrtSetDeviceSatMode) NOTHING(aclrtSetOpWaitTimeout) NOTHING(aclrtSetSysParamOpt)
NOTHING(aclrtCtxSetSysParamOpt) NOTHING(aclrtSetOpExecuteTimeOut)
NOTHING(rtDevBinaryRegister) NOTHING(rtFunctionRegister) NOTHING(rtGetC2cCtrlAddr) NOTHING(rtKernelLaunch)

/* --- The device ------------------------------------------------------------------------------------------------- */

static __thread int32_t device = 0;

static uint32_t devices(void) {
    const char *count = getenv("STUB_DRIVER_DEVICES");
    return count ? (uint32_t)atoi(count) : 1;
}

static void *handle(void) { return calloc(1, 64); }

int aclInit(const char *config) {
    (void)config;
    return LOGGED(aclInit, "");
}
int aclFinalize(void) { return LOGGED(aclFinalize, ""); }
const char *aclGetRecentErrMsg(void) { return ""; }
const char *aclrtGetSocName(void) { return "Ascend910B1"; }
int aclrtGetDeviceCount(uint32_t *count) {
    *count = devices();
    return 0;
}
int aclrtSetDevice(int32_t id) {
    device = id;
    return LOGGED(aclrtSetDevice, ", \"device\": %d", id);
}
int aclrtGetDevice(int32_t *id) {
    *id = device;
    return 0;
}
int aclrtDeviceCanAccessPeer(int32_t *can, int32_t id, int32_t peer) {
    *can = id != peer;
    return 0;
}
int aclrtDeviceGetBareTgid(int32_t *pid) {
    *pid = getpid();
    return 0;
}
int aclGetDeviceCapability(uint32_t id, int info, int64_t *value) {
    (void)id;
    (void)info;
    *value = 24;
    return 0;
}
int aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total) {
    (void)kind;
    *free_bytes = *total = MEMORY;
    return 0;
}
int aclrtGetSysParamOpt(int option, int64_t *value) {
    (void)option;
    *value = 0;
    return 0;
}
int aclrtSynchronizeDevice(void) { return LOGGED(aclrtSynchronizeDevice, ", \"device\": %d", device); }
int aclrtSynchronizeDeviceWithTimeout(int32_t timeout) {
    (void)timeout;
    return LOGGED(aclrtSynchronizeDevice, ", \"device\": %d", device);
}
int halGetDeviceInfo(uint32_t id, int32_t module, int32_t info, int64_t *value) {
    (void)id;
    (void)module;
    (void)info;
    *value = 0;
    return 0;
}
int halGetAPIVersion(int *version) {
    *version = 0x071000;
    return 0;
}

/* --- Streams, events and memory: nothing waits, and memory is the host's ---------------------------------------- */

int aclrtGetCurrentContext(void **context) {
    static int one;
    *context = &one;
    return 0;
}
int aclrtCreateStream(void **stream) { return !(*stream = handle()); }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) {
    (void)priority;
    (void)flag;
    return !(*stream = handle());
}
int aclrtStreamQuery(void *stream, int *status) {
    (void)stream;
    *status = 0; /* ACL_STREAM_STATUS_COMPLETE */
    return 0;
}
int aclrtStreamGetId(void *stream, int32_t *id) {
    (void)stream;
    *id = 3;
    return 0;
}
int aclrtCreateEventWithFlag(void **event, uint32_t flag) {
    (void)flag;
    return !(*event = handle());
}
int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { return aclrtCreateEventWithFlag(event, flag); }
int aclrtQueryEventStatus(void *event, int *status) {
    (void)event;
    *status = 1; /* ACL_EVENT_RECORDED_STATUS_COMPLETE */
    return 0;
}
int aclrtQueryEventWaitStatus(void *event, int *status) {
    (void)event;
    *status = 0; /* ACL_EVENT_WAIT_STATUS_COMPLETE */
    return 0;
}
int aclrtEventElapsedTime(float *ms, void *start, void *end) {
    (void)start;
    (void)end;
    *ms = 0;
    return 0;
}
static int allocate(void **memory, size_t bytes) {
    *memory = NULL;
    if (bytes > MEMORY || posix_memalign(memory, 512, bytes ? bytes : 1)) return FAILURE;
    memset(*memory, 0, bytes);
    return 0;
}
int aclrtMalloc(void **memory, size_t bytes, int policy) {
    (void)policy;
    return allocate(memory, bytes);
}
int aclrtMallocAlign32(void **memory, size_t bytes, int policy) { return aclrtMalloc(memory, bytes, policy); }
int aclrtMallocHost(void **memory, size_t bytes) { return allocate(memory, bytes); }
int aclrtFree(void *memory) {
    free(memory);
    return 0;
}
int aclrtFreeHost(void *memory) { return aclrtFree(memory); }
int aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, int kind) {
    (void)kind;
    if (bytes > room) return FAILURE;
    memcpy(to, from, bytes);
    return 0;
}
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes, int kind, void *stream) {
    (void)stream;
    return aclrtMemcpy(to, room, from, bytes, kind);
}
int aclrtMemset(void *memory, size_t room, int32_t value, size_t bytes) {
    if (bytes > room) return FAILURE;
    memset(memory, value, bytes);
    return 0;
}
int aclrtMemsetAsync(void *memory, size_t room, int32_t value, size_t bytes, void *stream) {
    (void)stream;
    return aclrtMemset(memory, room, value, bytes);
}

/* --- Operators: described, never run ---------------------------------------------------------------------------- */

void *aclCreateTensorDesc(int type, int count, const int64_t *sizes, int format) {
    (void)type;
    (void)count;
    (void)sizes;
    (void)format;
    return handle();
}
void *aclCreateDataBuffer(void *data, size_t bytes) {
    (void)data;
    (void)bytes;
    return handle();
}
static void add_task(const char *type);
int aclopCompileAndExecute(const char *type) {
    add_task(type);
    return LOGGED(aclopCompileAndExecute, ", \"type\": \"%s\"", type);
}
void *aclopCreateAttr(void) { return handle(); }
size_t aclGetCompileoptSize(int option) {
    (void)option;
    return 16;
}
int aclGetCompileopt(int option, char *value, size_t length) {
    (void)option;
    if (length) value[0] = 0;
    return 0;
}

/* --- The profiler of the driver --------------------------------------------------------------------------------- */

uint64_t MsprofSysCycleTime(void) { return (uint64_t)now_ns(CLOCK_MONOTONIC_RAW); }

struct aclprofConfig {
    int number; /* in this process, from 1, so that a log says which one is meant */
    uint32_t count;
    uint32_t devices[64];
    int metrics;
    uint64_t types;
};

static char result[4096]; /* where the data of the capture go: what aclprofInit was given */
static int configs = 0;
static int captures = 0;

static int number(const struct aclprofConfig *config) { return config ? config->number : 0; }

static void make(const char *path) {
    if (mkdir(path, 0750)) perror(path);
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *tasks[64]; /* by device, while a capture runs */
static int to_lose = 0;

static void add_task(const char *type) {
    pthread_mutex_lock(&lock);
    FILE *file = device >= 0 && device < 64 ? tasks[device] : NULL;
    if (file && to_lose > 0) {
        to_lose--;
    } else if (file) {
        fprintf(file, "%s %lld\n", type, (long long)now_ns(CLOCK_REALTIME));
        fflush(file);
    }
    pthread_mutex_unlock(&lock);
}

/* What CANN makes when a capture starts: the folders of its data, and the clocks that torch_npu reads. */
static void make_data(const struct aclprofConfig *config) {
    char root[4200], path[4400], stamp[32];
    time_t seconds = time(NULL);
    struct tm parts;
    strftime(stamp, sizeof stamp, "%Y%m%d%H%M%S", localtime_r(&seconds, &parts));
    snprintf(root, sizeof root, "%s/PROF_%06d_%s%03d_STUB%08dDRIVER", result, ++captures, stamp,
             (int)(now_ns(CLOCK_REALTIME) / 1000000 % 1000), getpid());
    make(root);
    snprintf(path, sizeof path, "%s/host", root);
    make(path);
    snprintf(path, sizeof path, "%s/host/data", root);
    make(path);
    snprintf(path, sizeof path, "%s/host/start_info", root);
    /* Both clocks at one time: between the two readings the process may have been paused. */
    int64_t before, real, after;
    int tries = 0;
    do {
        before = now_ns(CLOCK_MONOTONIC_RAW);
        real = now_ns(CLOCK_REALTIME);
        after = now_ns(CLOCK_MONOTONIC_RAW);
    } while (after - before > 1000 && ++tries < 1000);
    FILE *file = fopen(path, "w");
    if (file) {
        fprintf(file, "{\"collectionTimeBegin\": \"%lld.%03d\", \"clockMonotonicRaw\": \"%lld\"}",
                (long long)real / 1000, (int)(real % 1000), (long long)before);
        fclose(file);
    }
    for (uint32_t i = 0; config && i < config->count && !getenv("STUB_DRIVER_NO_DEVICE_DATA"); i++) {
        snprintf(path, sizeof path, "%s/device_%u", root, config->devices[i]);
        make(path);
        snprintf(path, sizeof path, "%s/device_%u/data", root, config->devices[i]);
        make(path);
        snprintf(path, sizeof path, "%s/device_%u/data/stub_tasks", root, config->devices[i]);
        if (config->devices[i] < 64 && (file = fopen(path, "we"))) {
            fprintf(file, "data_types=0x%llx aic_metrics=%d\n", (unsigned long long)config->types, config->metrics);
            fflush(file);
            tasks[config->devices[i]] = file;
        }
    }
}

static void end_tasks(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 64; i++) {
        if (tasks[i]) fclose(tasks[i]);
        tasks[i] = NULL;
    }
    pthread_mutex_unlock(&lock);
}

int aclprofInit(const char *path, size_t length) {
    char text[4096];
    snprintf(result, sizeof result, "%.*s", (int)length, path);
    quoted(text, sizeof text, path, length);
    return LOGGED(aclprofInit, ", \"path\": \"%s\"", text);
}
int aclprofFinalize(void) { return LOGGED(aclprofFinalize, ""); }
struct aclprofConfig *aclprofCreateConfig(uint32_t *ids, uint32_t count, int metrics, const void *events,
                                          uint64_t types) {
    (void)events;
    char list[1024] = "";
    struct aclprofConfig *config = calloc(1, sizeof *config);
    config->number = ++configs;
    config->metrics = metrics;
    config->types = types;
    for (uint32_t i = 0; i < count && i < 64; i++) {
        config->devices[config->count++] = ids[i];
        snprintf(list + strlen(list), sizeof list - strlen(list), i ? ",%u" : "%u", ids[i]);
    }
    if (LOGGED(aclprofCreateConfig,
               ", \"config\": %d, \"devices\": \"%s\", \"aic_metrics\": %d, \"data_types\": \"0x%llx\"",
               config->number, list, metrics, (unsigned long long)types)) {
        free(config);
        return NULL;
    }
    return config;
}
int aclprofDestroyConfig(struct aclprofConfig *config) {
    int outcome = LOGGED(aclprofDestroyConfig, ", \"config\": %d", number(config));
    free(config);
    return outcome;
}
int aclprofSetConfig(int type, const char *value, size_t length) {
    char text[4096];
    quoted(text, sizeof text, value, length);
    return LOGGED(aclprofSetConfig, ", \"type\": %d, \"value\": \"%s\"", type, text);
}
int aclprofWarmup(const struct aclprofConfig *config) {
    return LOGGED(aclprofWarmup, ", \"config\": %d", number(config));
}
int aclprofStart(const struct aclprofConfig *config) {
    int outcome = LOGGED(aclprofStart, ", \"config\": %d", number(config));
    if (!outcome) {
        end_tasks();
        const char *lost = getenv("STUB_DRIVER_LOSE_TASKS");
        pthread_mutex_lock(&lock);
        to_lose = lost ? atoi(lost) : 0;
        make_data(config);
        pthread_mutex_unlock(&lock);
    }
    return outcome;
}
int aclprofStop(const struct aclprofConfig *config) {
    end_tasks();
    return LOGGED(aclprofStop, ", \"config\": %d", number(config));
}

/* What of the profiler is optional: without this, torch_npu leaves op_attr and the metric MemoryAccess out. */
struct feature {
    void *record_vtable; /* torch_npu's structs have virtual destructors, which it does not call here */
    char name[64];
    void *info_vtable;
    char compatibility[16];
    char version[16];
    char component[16];
    char component_version[16];
    char log[128];
};
int aclprofGetSupportedFeaturesV2(size_t *count, void **features) {
    static struct feature all[] = {
        {NULL, "ATTR", NULL, "0", "1", "all", "all", "stub"},
        {NULL, "MemoryAccess", NULL, "0", "1", "all", "all", "stub"},
    };
    *count = sizeof all / sizeof *all;
    *features = all;
    return 0;
}

/* --- Ranges and marks of mstx, and the dump of operators' arguments --------------------------------------------- */

static uint64_t ranges = 0;

static void marked(const char *name, const char *domain, const char *message, void *stream, uint64_t id) {
    char text[2048], domain_text[256];
    quoted(text, sizeof text, message, message ? strlen(message) : 0);
    quoted(domain_text, sizeof domain_text, domain, domain ? strlen(domain) : 0);
    called(name, ", \"domain\": \"%s\", \"message\": \"%s\", \"on_stream\": \"%s\", \"id\": %llu", domain_text, text,
           stream ? "yes" : "no", (unsigned long long)id);
}
static uint64_t new_range(void) { return __atomic_add_fetch(&ranges, 1, __ATOMIC_RELAXED); }

void mstxMarkA(const char *message, void *stream) { marked("mstxMarkA", "", message, stream, 0); }
uint64_t mstxRangeStartA(const char *message, void *stream) {
    uint64_t id = new_range();
    marked("mstxRangeStartA", "", message, stream, id);
    return id;
}
void mstxRangeEnd(uint64_t id) { called("mstxRangeEnd", ", \"id\": %llu", (unsigned long long)id); }
void *mstxDomainCreateA(const char *name) { return strdup(name); }
void mstxDomainDestroy(void *domain) { free(domain); }
void mstxDomainMarkA(void *domain, const char *message, void *stream) {
    marked("mstxDomainMarkA", domain, message, stream, 0);
}
uint64_t mstxDomainRangeStartA(void *domain, const char *message, void *stream) {
    uint64_t id = new_range();
    marked("mstxDomainRangeStartA", domain, message, stream, id);
    return id;
}
void mstxDomainRangeEnd(void *domain, uint64_t id) {
    (void)domain;
    called("mstxDomainRangeEnd", ", \"id\": %llu", (unsigned long long)id);
}

int aclopStartDumpArgs(uint32_t type, const char *path) {
    (void)type;
    char text[4096];
    quoted(text, sizeof text, path, strlen(path));
    return LOGGED(aclopStartDumpArgs, ", \"path\": \"%s\"", text);
}
int aclopStopDumpArgs(uint32_t type) {
    (void)type;
    return LOGGED(aclopStopDumpArgs, "");
}
