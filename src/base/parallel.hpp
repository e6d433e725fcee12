// A bounded loop over independent tasks on a few threads. The first task that throws stops the others from starting and
// its error is rethrown; the calling thread waits, polls the interrupt callback, and works itself when one thread is
// enough. A task on a thread of the loop that polls (base/clock.hpp) is interrupted when the loop is stopped. No thread
// outlives the call.
#pragma once

#include <cstddef>
#include <functional>

namespace tsr {

// Calls run(task, worker) for every task in [0, tasks), in order of start; worker is in [0, threads). `poll`, if there
// is one, is called on the calling thread at least each poll_slice, or after each task if it does them itself.
void run_parallel(size_t tasks, int threads, const std::function<void(size_t task, int worker)>& run,
                  const std::function<void()>& poll = {});

}  // namespace tsr
