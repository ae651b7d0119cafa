-- MarkDurable, one step: trained -> durable, payloads retired. ARGV: epoch, step.
-- Reply: ok, groups that are durable at this step | no_run | fenced, epoch
if not CFG.infra then return { 'no_run' } end
local refusal = refuse_epoch(tonumber(ARGV[1]))
if refusal then return refusal end
local groups, counters = 0, PREFIX .. 'n:train'
for _, ordinal in ipairs(call('ZRANGE', PREFIX .. 'step:train:' .. ARGV[2], 0, -1)) do
  local group = load('train', ordinal)
  if group.state == 'trained' then
    move(group, 'durable')
    retire(group)
    emit('durable', 'train', ordinal, usable(group), ARGV[2], '', ARGV[1])
  end
  if group.state == 'durable' then groups = groups + 1 end
end
local through = tonumber(call('HGET', counters, 'durable') or '0')
call('HSET', counters, 'durable', math.max(through, tonumber(ARGV[2]) + 1))
commit()
return { 'ok', groups }
