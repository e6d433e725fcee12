// What each opaque handle of types.h is. Magic words are ASCII of the type's name.
#pragma once

#include "comm/communicator.hpp"
#include "guard.hpp"
#include "store/store.hpp"

struct tsr_store : tsr::capi::Handle<tsr::Store, 0x545352'53544f5245> {};
struct tsr_comm : tsr::capi::Handle<tsr::Communicator, 0x545352'434f4d4d> {};
struct tsr_work : tsr::capi::Handle<tsr::Work, 0x545352'574f524b> {};
struct tsr_buffer : tsr::capi::Handle<tsr::Buffer, 0x545352'425546> {};
