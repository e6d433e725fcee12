// A loop over independent tasks on a few threads. The first task that throws stops others from starting, and its error
// is rethrown. The calling thread waits and polls the interrupt callback, or does the work itself if one thread is
// enough. When the loop stops, tasks that poll for interrupts (base/clock.hpp) are interrupted. No thread outlives the
// call.
#pragma once

#include <cstddef>
#include <functional>

namespace tsr {

// Calls run(task, worker) for every task in [0, tasks), starting them in order; worker is in [0, threads). `poll`, if
// given, is called on the calling thread at least once per poll_slice, or after each task if that thread does the work.
void run_parallel(size_t tasks, int threads, const std::function<void(size_t task, int worker)>& run,
                  const std::function<void()>& poll = {});

}  // namespace tsr
