"""Lua scripts that Redis runs, each atomically.

    <prefix>:{<id>}               "kvm1 <write> <bytes> <part bytes>": the manifest of an entry; id is the key in hex
    <prefix>:{<id>}:<write>:<i>   part i of the write `write`; expires unless its manifest is written
    <prefix>:used                 sorted set: id -> microsecond of the last use, no two alike   ┐
    <prefix>:sizes                hash: id -> bytes; `bytes`, `clock`                           ┘ only with a quota

With a quota, `bytes` is the sum of all entries, and never exceeds it after a step. Room is made before a write begins,
and once more when it becomes the entry, since others may have written meanwhile. Scripts may free memory when Redis has
none left (`allow-oom`), so that no step stops half way; parts are written outside of them and are refused.

A part in progress has an expiry, which the step that writes its manifest removes. So a part without expiry that no
manifest names belongs to an entry whose manifest was evicted, overwritten or removed: `COLLECT` removes it.
"""

from __future__ import annotations

from typing import Final

MAX_PARTS: Final = 2**16

_SHARED = """
local prefix = KEYS[1]
local used, sizes = prefix .. ':used', prefix .. ':sizes'

local function name(id) return prefix .. ':{' .. id .. '}' end
local function part(id, write, i) return name(id) .. ':' .. write .. ':' .. i end
local function number(field) return tonumber(redis.call('HGET', sizes, field) or 0) or 0 end
local function add(field, n) redis.call('HINCRBY', sizes, field, n) end
local function text_of(reply) if type(reply) == 'string' then return reply end return '' end

local function moment()
  local time = redis.call('TIME')
  local now = math.max(tonumber(time[1]) * 1000000 + tonumber(time[2]), number('clock') + 1)
  redis.call('HSET', sizes, 'clock', now)
  return now
end

local function count_of(bytes, part_bytes) return math.max(1, math.ceil(bytes / part_bytes)) end

local function manifest(id)
  local text = text_of(redis.pcall('GETRANGE', name(id), 0, 127))
  local write, bytes, part_bytes = string.match(text, '^kvm1 (%x+) (%d+) (%d+)$')
  bytes, part_bytes = tonumber(bytes), tonumber(part_bytes)
  if not write or part_bytes < 1 or count_of(bytes, part_bytes) > MAX_PARTS then return nil end
  return text, write, bytes, part_bytes
end

local function is_whole(id, write, bytes, part_bytes)
  local count = count_of(bytes, part_bytes)
  for i = 0, count - 1 do
    local want = part_bytes
    if i == count - 1 then want = bytes - i * part_bytes end
    if redis.pcall('STRLEN', part(id, write, i)) ~= want or
       redis.call('EXISTS', part(id, write, i)) == 0 then return false end
  end
  return true
end

local function unlink_parts(id, write, count)
  for i = 0, count - 1 do redis.call('UNLINK', part(id, write, i)) end
end

local function forget(id)
  local bytes = redis.call('HGET', sizes, id)
  if bytes then
    redis.call('HDEL', sizes, id)
    add('bytes', 0 - tonumber(bytes))  -- a -0 is no integer to Redis
  end
  redis.call('ZREM', used, id)
end

local function account(id, bytes)
  forget(id)
  redis.call('HSET', sizes, id, bytes)
  add('bytes', bytes)
  redis.call('ZADD', used, moment(), id)
end

-- removes an entry; returns its bytes, or -1 if there was none
local function drop(id)
  local text, write, bytes, part_bytes = manifest(id)
  if text then
    unlink_parts(id, write, count_of(bytes, part_bytes))
    redis.call('UNLINK', name(id))
  end
  forget(id)
  return bytes or -1
end

-- the manifest, if all of the entry is there; else what is left of it goes, and nothing of it is counted
local function whole(id)
  local text, write, bytes, part_bytes = manifest(id)
  if text and is_whole(id, write, bytes, part_bytes) then return text, bytes end
  if text then drop(id) elseif redis.call('HEXISTS', sizes, id) == 1 then forget(id) end
  return nil
end

-- removes the least recently used, but not `kept`, until no more than `limit` bytes are held; how many
local function make_room(limit, kept)
  local gone = 0
  while number('bytes') > limit do
    local victims = redis.call('ZRANGE', used, 0, 1)
    local victim = victims[1] ~= kept and victims[1] or victims[2]
    if not victim then  -- Redis evicted a part of the books: start them again, `scan` fills them
      local bytes = redis.call('HGET', sizes, kept)
      redis.call('DEL', sizes)
      if bytes then account(kept, tonumber(bytes)) end
      break
    end
    drop(victim)
    gone = gone + 1
  end
  return gone
end

local function totals() return number('bytes'), redis.call('ZCARD', used) end
""".replace("MAX_PARTS", str(MAX_PARTS))

_COMMON = "#!lua flags=allow-oom" + _SHARED
_READING = "#!lua flags=no-writes" + _SHARED
"""Header of scripts that a server runs even if it accepts no writes now."""

ROOM: Final = (
    _COMMON
    + """
-- id, bytes, quota: makes room for a write that begins; how many others left
local id, bytes, quota = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
return make_room(math.max(0, quota - bytes + number(id)), id)
"""
)

COMMIT: Final = (
    _COMMON
    + """
-- id, write, bytes, part bytes, quota or 0: makes what was written the entry; 1 or 0, how many others left, bytes of
-- the entry that was there or -1
local id, write = ARGV[1], ARGV[2]
local bytes, part_bytes, quota = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local count = count_of(bytes, part_bytes)
local is_stored, gone, before = is_whole(id, write, bytes, part_bytes), 0, -1
if is_stored then
  before = drop(id)
  redis.call('SET', name(id), string.format('kvm1 %s %.0f %.0f', write, bytes, part_bytes))
  for i = 0, count - 1 do redis.call('PERSIST', part(id, write, i)) end
  if quota > 0 or redis.call('EXISTS', used) == 1 then account(id, bytes) end
  if quota > 0 then gone = make_room(quota, id) end
else
  unlink_parts(id, write, count)
end
return {is_stored and 1 or 0, gone, before, totals()}
"""
)

CANCEL: Final = (
    _COMMON
    + """
-- (id, write, number of parts)...: removes the parts of unfinished writes
for i = 1, #ARGV, 3 do unlink_parts(ARGV[i], ARGV[i + 1], math.min(tonumber(ARGV[i + 2]), MAX_PARTS)) end
return {totals()}
""".replace("MAX_PARTS", str(MAX_PARTS))
)

LOOK: Final = (
    _COMMON
    + """
-- 1 for a use or 0, ids...: the manifests, '' where no whole entry is
local found = {}
for i = 2, #ARGV do
  local text = whole(ARGV[i])
  if text and ARGV[1] == '1' and redis.call('ZSCORE', used, ARGV[i]) then
    redis.call('ZADD', used, moment(), ARGV[i])
  end
  found[i - 1] = text or ''
end
return found
"""
)

FIND: Final = (
    _READING
    + """
-- ids...: the manifests, '' where no whole entry is; changes nothing, and looks into no books
local found = {}
for i, id in ipairs(ARGV) do
  local text, write, bytes, part_bytes = manifest(id)
  found[i] = text and is_whole(id, write, bytes, part_bytes) and text or ''
end
return found
"""
)

DELETE: Final = (
    _COMMON
    + """
-- ids...: removes entries; bytes of each, or -1
local found = {}
for i, id in ipairs(ARGV) do
  local text, bytes = whole(id)
  if text then drop(id) end
  found[i] = bytes or -1
end
return {found, totals()}
"""
)

RECONCILE: Final = (
    _COMMON
    + """
-- quota or 0, ids...: puts right what is counted; bytes and microsecond of the last use of each, or -1 and 0
local found = {}
for i = 2, #ARGV do
  local id = ARGV[i]
  local text, bytes = whole(id)
  local is_counted = number(id) == bytes and redis.call('ZSCORE', used, id)
  if text and tonumber(ARGV[1]) > 0 and not is_counted then account(id, bytes) end
  found[i - 1] = {bytes or -1, redis.call('ZSCORE', used, id) or '0'}
end
return {found, totals()}
"""
)

COLLECT: Final = (
    _COMMON
    + """
-- cursor, count: looks at about so many names, and removes parts that stay though no manifest names their write; the
-- next cursor, and how many were removed
local reply, gone = redis.call('SCAN', ARGV[1], 'MATCH', prefix .. ':{*}:*', 'COUNT', ARGV[2]), 0
for _, found in ipairs(reply[2]) do
  local id, write = string.match(string.sub(found, #prefix + 2), '^{(%x+)}:(%x+):%d+$')
  if id and redis.call('PTTL', found) == -1 then
    local _, named = manifest(id)
    if named ~= write then gone = gone + redis.call('UNLINK', found) end
  end
end
return {reply[1], gone}
"""
)
