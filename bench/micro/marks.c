/* Callgrind's requests as functions for ctypes. Outside valgrind they do nothing. */
#include <valgrind/callgrind.h>

void begin(void) { CALLGRIND_START_INSTRUMENTATION; }
void toggle(void) { CALLGRIND_TOGGLE_COLLECT; }
void dump(const char *stage) { CALLGRIND_DUMP_STATS_AT(stage); }
int watched(void) { return RUNNING_ON_VALGRIND; }
