#define _GNU_SOURCE
/* Clock of a node: adds the seconds in the file CLOCK_FILE to CLOCK_REALTIME. Preloaded into the node's processes. */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long *offset;

__attribute__((constructor)) static void start(void) {
  static const long zero;
  const char *path = getenv("CLOCK_FILE");
  int file = path ? open(path, O_RDONLY) : -1;
  void *map = file < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
  if (file >= 0) close(file);
  offset = map == MAP_FAILED ? &zero : map;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  long result = syscall(SYS_clock_gettime, clock, now);
  if (!result && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset;
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec precise;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec, now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *result) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result) *result = now.tv_sec;
  return now.tv_sec;
}

/* A deadline by the node's clock, in the kernel's time. Those by the monotonic clock are smaller than any date. */
static struct timespec real(const struct timespec *deadline) {
  struct timespec own = *deadline;
  if (own.tv_sec > 1000000000 && offset) own.tv_sec -= *offset;
  return own;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, const struct timespec *restrict deadline) {
  int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *) = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  struct timespec own = real(deadline);
  return next(condition, mutex, &own);
}
